"""`faser bench bystander`: no request may hold up another client's stream, or hold more memory than it may."""
