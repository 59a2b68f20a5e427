"""The TPU API v2: handlers from request to answer, in Google's own published messages, whatever brought them."""
