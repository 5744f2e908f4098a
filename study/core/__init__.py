"""What a user may ask for: settings, arms, model shapes."""
