"""A trained model in use: loaded, evaluated, predicting, exported."""
