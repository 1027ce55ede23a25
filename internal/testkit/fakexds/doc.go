// Package fakexds is a control plane for tests. It speaks ADS over real gRPC on
// a loopback port, in both variants, the way istiod was seen to speak it:
//
//   - the node is wanted in the first request of a stream and its absence is
//     InvalidArgument;
//   - a new stream is sent the whole state at once, if there is any;
//   - the whole table is one resource without a name and, in the incremental
//     variant, without a version;
//   - a state-of-the-world request without a nonce gets everything again, an
//     incremental one gets nothing;
//   - neither ACK nor NACK is waited for, and nothing is sent again after a NACK.
//
// Beyond istiod it can push named resources, responses that a test composed by
// hand, cut its streams, refuse the incremental RPC, and go away and come back
// on the same port.
//
// Nonces are "nonce-1", "nonce-2" … in the order of sending and versions are
// "v1", "v2" … in the order of pushing, so that a whole dialogue can be
// compared with the expected one. Every request is kept; a test waits for the
// one it needs with [Server.Wait] or [Server.WaitAnswer].
package fakexds
