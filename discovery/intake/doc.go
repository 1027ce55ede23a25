// Package intake bounds the resources that clients can occupy, so no client can take what other clients need.
//
//   - places.go bounds the number of clients: of all, of each address, of each namespace, and of those that prove no
//     identity.
//   - unread.go counts the bytes of requests that have arrived, and that no handler has read. gRPC keeps at least 64
//     KiB for each stream, and 4 MiB for a message that is half received. If there are too many, package connlimit
//     closes a connection.
//   - frames.go finds the bytes of requests in a connection.
package intake
