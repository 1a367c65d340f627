"""What the Spark benchmark is made of: records, the local Arrow source it is compared with, and its cells."""
