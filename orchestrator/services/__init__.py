"""Operations of the server as plain functions on plain data: one for each REST route."""
