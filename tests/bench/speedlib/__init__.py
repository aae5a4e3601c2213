"""What `dev.py bench speed` is made of: models, methods, measuring, counting, accounts, pictures."""
