"""`faser bench soak`: a real service under load, cancellations, bad input and kills; every request is accounted for."""
