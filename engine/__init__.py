"""What is done with a checkpoint: plan, read, decode, cast, place, check and convert. Imports the registry, never the other way."""
