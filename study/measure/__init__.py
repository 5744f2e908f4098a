"""The instruments, and the readback of what the prepared objects really are."""
