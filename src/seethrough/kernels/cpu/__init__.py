"""The `cpu` backend: the program's operations as compiled kernels that share one set of workers."""
