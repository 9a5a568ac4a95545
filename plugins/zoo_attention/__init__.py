"""The zoo's own attention mechanisms, one package each: card here, mathematics in attention.py."""
