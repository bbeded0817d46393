"""Any outside program as a harness."""
