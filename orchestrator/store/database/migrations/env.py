"""Script that Alembic runs for every command, with the connection and transaction of the caller."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()
