"""What callbacks share: protocols, events, reports, scalars, and what is known of the update under way."""
