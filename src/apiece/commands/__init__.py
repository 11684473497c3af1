"""The commands of `apiece`: what each asks for, calls and shows."""
