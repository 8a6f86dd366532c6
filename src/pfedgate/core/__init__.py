"""The nouns: types, state (arithmetic on States), seeds, schedule, algorithm, errors. Everything else imports these."""
