"""Chat templates of tokenizers that nobody vouches for: each is rendered once, in a process of its own with bounds.

The sandbox in which transformers renders them keeps them from files and objects, not from loops without end or text
without bound.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from slipcast.registry.errors import CompanionError

_PROMPT = "a red fox in snow"
_CPU_SECONDS = 5
_MEMORY_BYTES = 4 << 30
_WALL_SECONDS = 120
"""Where the system bounds no CPU time."""
_LONGEST_TEXT = 1 << 20
_CHILD = """
import json, sys
asked = json.load(sys.stdin)
from transformers.utils.chat_template_utils import render_jinja_template
try:
    import resource
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + asked["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass
faults = []
for messages in asked["conversations"]:
    try:
        template, tokens = asked["template"], asked["tokens"]
        found = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **tokens)
        text = (found[0] if isinstance(found, tuple) else found)[0]
        if len(text) > asked["longest"]:
            faults.append(f"gives {len(text):,} characters")
        elif asked["prompt"] not in text:
            faults.append("gives a text without the prompt: " + repr(text[:80]))
        else:
            faults = []
            break
    except BaseException as error:
        faults.append(f"fails: {type(error).__name__}: {str(error)[:300]}")
print(json.dumps(faults[:1]))
"""


def check_chat_template(processor: Any, role: str, path: Path | None) -> None:
    """Refuse a chat template that can't be rendered, has no end, or loses the prompt; where there is none, do nothing.

    Args:
        processor: the tokenizer, or a processor that has one.
        role: the pipeline's own name of it.
        path: its folder, for the message.

    Raises:
        CompanionError: it says what becomes of a prompt.
    """
    template = getattr(processor, "chat_template", None)
    if template is None:
        return
    if isinstance(template, Mapping):
        template = template.get("default")
    fault = _fault(template, _tokens(processor)) if isinstance(template, str) else "is no text"
    if fault is not None:
        raise CompanionError(
            f"as the {role}: a chat template that {fault}",
            expected="a template in Jinja that makes a short text of a prompt and has it in it",
            hint="correct chat_template.jinja, or chat_template in tokenizer_config.json; or download the folder again",
            path=path,
            roles=(role,),
        )


def _tokens(processor: Any) -> str:
    """The special tokens that a template may name, as JSON."""
    tokens = getattr(getattr(processor, "tokenizer", processor), "special_tokens_map", {})
    return json.dumps({name: str(token) for name, token in tokens.items() if not isinstance(token, list)})


@lru_cache(maxsize=16)
def _fault(template: str, tokens: str) -> str | None:
    """What a template does wrong, as a clause; None where it works, and where no other process can be asked."""
    if not Path(sys.executable or "").name.startswith(("python", "pypy")):
        return None  # inside of another program, which would be started anew
    asked = {
        "template": template,
        "tokens": json.loads(tokens),
        "prompt": _PROMPT,
        "conversations": _conversations(),
        "cpu_seconds": _CPU_SECONDS,
        "memory_bytes": _MEMORY_BYTES,
        "longest": _LONGEST_TEXT,
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", _CHILD]
    try:
        ended = subprocess.run(
            command, input=json.dumps(asked).encode(), capture_output=True, timeout=_WALL_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return _ENDLESS
    if ended.returncode < 0 or not ended.stdout:
        return _ENDLESS
    faults = json.loads(ended.stdout.splitlines()[-1])
    return faults[0] if faults else None


_ENDLESS = f"is not rendered in {_CPU_SECONDS} seconds and {_MEMORY_BYTES >> 30} GiB"


def _conversations() -> list[list[dict[str, Any]]]:
    """One prompt in the forms in which pipelines give it; a template has to take one of them."""
    parts = [{"type": "text", "text": _PROMPT}]
    system = {"role": "system", "content": "Describe it."}
    return [
        [{"role": "user", "content": _PROMPT}],
        [{"role": "user", "content": parts}],
        [system, {"role": "user", "content": _PROMPT}],
        [{**system, "content": [{"type": "text", "text": "Describe it."}]}, {"role": "user", "content": parts}],
    ]
