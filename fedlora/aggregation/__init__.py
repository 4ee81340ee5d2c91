"""Pure aggregation functions on factors, frames and tangents."""
