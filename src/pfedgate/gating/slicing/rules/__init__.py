"""What each operation does with dead units: one rule per kind of operation."""
