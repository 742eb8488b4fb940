"""`faser bench soak`: a service under load, cancellations, bad input and kills, with an account of every request."""
