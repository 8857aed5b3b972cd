"""The commands, one module each: thin shells over one library function."""
