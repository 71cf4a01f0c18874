"""What is done with a checkpoint: plan, read, decode, cast, place, check, convert. The registry never imports it."""
