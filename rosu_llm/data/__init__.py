"""Data: pairing of forget and retain samples, questions and answers, the generated people of the demo."""
