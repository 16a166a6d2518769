"""Exchange between ranks: shared memory on a CPU, NCCL on GPUs, gloo elsewhere."""
