"""Private PyTorch interfaces, one function per need. Nothing else in this library names one."""
