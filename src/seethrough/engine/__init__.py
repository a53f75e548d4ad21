"""The autoregressive loop (S3, S13): requests, the ragged batch of a step, outputs."""
