"""The use of a trained model: loading, evaluation, prediction, export."""
