"""What a head gets right and wrong, and the tau of any tree, from one log of drafts."""
