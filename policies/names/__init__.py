"""Names: destinations, patterns of them, and the table that routes one to the other. Imports errors alone.

table = RouteTable([(Pattern.parse("orders.>"), "orders")])
table.route(Destination.parse("orders.custom")).target
"""
