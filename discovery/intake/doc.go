// Package intake bounds the resources that clients can occupy, so no client can take what other clients need.
//
//   - places.go bounds the number of clients: of all, of each address, of each namespace, and of those that prove no
//     identity.
//   - budget.go bounds the bytes of requests that have arrived, and that no handler has read. gRPC keeps at least 64
//     KiB for each stream, and 4 MiB for a message that is half received. When the bound is exceeded, a connection is
//     closed: the one that holds the most bytes, at the address that holds the most. So an address that holds less than
//     its share of the bound loses no connection, whatever other addresses do.
//   - frames.go finds the bytes of requests in a connection.
package intake
