// Package fakexds is a control plane for tests. It speaks ADS over real gRPC on a loopback
// port or in memory, in both variants, as istiod does:
//
//   - The first request of a stream must have a node; otherwise the stream ends with
//     InvalidArgument.
//   - A new stream is sent the whole state at once, if there is any.
//   - The whole table is one resource without a name and, in the incremental variant,
//     without a version.
//   - The server answers a state-of-the-world request without a nonce with the whole state again. It does not answer an
//     incremental request without a nonce.
//   - The server does not wait for an ACK or a NACK, and sends nothing again after a NACK.
//
// Unlike istiod, it can also push responses that a test composes. The server can end its streams, refuse the
// incremental RPC, and stop and restart on the same address.
//
// Nonces are "nonce-1", "nonce-2" … in the order of sending, and versions are "v1", "v2" …
// in the order of pushing, so a test can compare a whole dialogue with the expected one.
// The server records every request; a test waits for the request that it needs with [Server.Wait] or
// [Server.WaitAnswer].
package fakexds
