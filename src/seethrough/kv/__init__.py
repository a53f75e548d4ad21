"""Where K and V live (S0, S6.8): a pool of fixed blocks, block tables, and a check of the books."""
