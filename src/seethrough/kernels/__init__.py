"""The arithmetic: `ops` is the contract of every operation, `reference` its plain NumPy form."""
