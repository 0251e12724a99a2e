"""What a host shows of its processes: sockets, load, the kernel's log, dumps of PyTorch. Both halves use it."""
