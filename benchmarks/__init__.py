"""Commands that measure; each says at its top what it prints and what must hold."""
