"""What a round of the engine costs on this GPU, and where its time goes."""
