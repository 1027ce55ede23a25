// Package discovery is nametap's own control plane: it reads Kubernetes and
// Istio objects from a directory, builds name tables from them and serves the
// tables over ADS in both variants, incremental and state-of-the-world.
//
// The way of an object, and where to read it:
//
//  1. walk.go and source.go read the directory; watch.go says when to read it
//     again, and follow.go does it.
//  2. parse.go splits files into documents, decode.go reads fields with their
//     lines, kinds.go makes objects. A broken document costs only itself, and
//     an object that was good before keeps its last good form, which
//     lastgood.go keeps on disk. Nothing is served before there is an object,
//     and a directory that becomes empty keeps all of them (Config.AllowEmpty).
//  3. build.go turns objects into claims: this host has these addresses, says
//     that namespace. It is a pure function.
//  4. vip.go gives addresses to external hosts that have none; state.go
//     remembers them.
//  5. view.go selects what one kind of client may see and merges the claims
//     of a host into one table entry.
//  6. cache.go hands the tables to go-control-plane's server and wakes only
//     those clients for which something differs; codec.go lets all of them share
//     the bytes of a table, and streams.go bounds what they can hold.
//
// What a client sees depends on four things that it says of itself in its
// node: its namespace (exportTo), its address families, whether it
// asks for automatic VIPs (DNS_AUTO_ALLOCATE), and whether it merges several tables. A client that
// does not merge gets one unnamed table, as from istiod; one that does gets a
// table per namespace, so that an edit carries one namespace only.
package discovery
