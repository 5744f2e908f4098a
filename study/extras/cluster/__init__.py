"""An emulated cluster on one machine."""
