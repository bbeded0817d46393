"""Where harnesses meet models, and where all that passes is recorded."""
