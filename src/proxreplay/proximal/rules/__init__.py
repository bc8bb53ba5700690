"""What a gradient rule is, and each of them: LPR, A-GEM, OWM and AOP, GPM and SGP."""
