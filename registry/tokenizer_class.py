"""The class that a tokenizer's own files name, held against the one that a pipeline expects."""

from __future__ import annotations

from pathlib import Path

from slipcast.registry.errors import CompanionError
from slipcast.registry.untrusted_files import read_json_object

TOKENIZER_CONFIG = "tokenizer_config.json"
_LIMIT_MIB = 16
_FAST = "Fast"
_ANY = frozenset({"PreTrainedTokenizer", "PythonBackend", "SentencePieceBackend", "TokenizersBackend", "AutoTokenizer"})
"""Classes of transformers that serve for every tokenizer, besides their fast variants: they speak against none."""


def named_tokenizer_class(folder: Path) -> str | None:
    """The class that a tokenizer's folder names, by ``transformers.Name``; None where it names none.

    Raises:
        HeaderError: its configuration is no strict JSON.
    """
    if not (folder / TOKENIZER_CONFIG).is_file():
        return None
    named = read_json_object(folder / TOKENIZER_CONFIG, limit_mib=_LIMIT_MIB).get("tokenizer_class")
    return f"transformers.{named}" if isinstance(named, str) else None


def refuse_other_tokenizer(folder: Path, role: str, needed: str) -> None:
    """Refuse a tokenizer's folder that names another tokenizer than the pipeline expects; a fast variant is the same.

    Args:
        folder: with the tokenizer's files.
        role: the pipeline's own name of it.
        needed: the class that the family names; of a processor, which is more than a tokenizer, nothing is refused.

    Raises:
        CompanionError: it names another.
    """
    named = named_tokenizer_class(folder)
    if named is None or "Tokenizer" not in needed:
        return
    here, expected = (name.rpartition(".")[2].removesuffix(_FAST) for name in (named, needed))
    if here != expected and not {here, expected} & _ANY:
        raise CompanionError(
            f"as the {role}: a tokenizer of the class {named[:200]}",
            expected=f"a folder with the files of {needed}",
            hint=f"name the tokenizer of this pipeline by the setting companions.{role}",
            path=folder / TOKENIZER_CONFIG,
            roles=(role,),
        )
