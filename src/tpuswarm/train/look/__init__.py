"""What a person sees of a run: live views, outputs, reports, pictures, profiles."""
