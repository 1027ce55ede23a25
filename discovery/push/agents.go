package push

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/nametap/nametap/discovery/hosts"
)

// An Agent is the state of a client that has a stream.
type Agent struct {
	// Replica is the replica of the control plane that the client is connected to.
	Replica string `json:"replica"`
	// Namespace, Name and ID are from the node id; Name is the name of the pod or the VM. All are empty before the
	// first request.
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	ID        string `json:"id"`
	// Address is where the connection comes from. TLS is true if the client has proven its
	// identity.
	Address string `json:"address"`
	TLS     bool   `json:"tls"`
	// Software is the name and the version of the client's program, if it sends them.
	Software string `json:"software"`
	// Mode is what the client is sent after a change: the shards of its table that have changed, which are resources with
	// names ("named"), or its whole table ("whole").
	// Variant is the variant of the protocol (ADS) on the client's stream: "sotw" (state-of-the-world) or "delta".
	Mode    string `json:"mode"`
	Variant string `json:"variant"`
	// View describes what selects the client's hosts, for example "namespace shop, IPv4, automatic VIPs".
	View string `json:"view"`
	// The times are given in seconds before now; nil means never.
	ConnectedSeconds float64  `json:"connectedSeconds"`
	LastPushSeconds  *float64 `json:"lastPushSeconds"`
	LastAckSeconds   *float64 `json:"lastAckSeconds"`
	// Digest is the checksum (digest.OfTable) of the table that the client has, because it has announced or accepted it on
	// this stream; "" for none. ServedDigest is the checksum of the client's current table, which has Hosts hosts.
	Digest       string `json:"digest"`
	ServedDigest string `json:"servedDigest"`
	Hosts        int    `json:"hosts"`
	// Current is true if Digest equals ServedDigest. Behind is true if the client has rejected its last push, or has
	// been without its current table for at least behindAfter.
	Current bool       `json:"current"`
	Behind  bool       `json:"behind"`
	State   AgentState `json:"state"`
	// Nack is the last push that the client has rejected on this stream; nil means none.
	Nack *Nack `json:"nack"`
}

// A Nack is a push that was rejected.
type Nack struct {
	// Reason is the first 256 bytes of the reason that the client gives.
	Reason  string  `json:"reason"`
	Seconds float64 `json:"seconds"` // ago
}

// An AgentState tells whether a client has its table and, if not, why.
type AgentState string

// The states of clients.
const (
	StateWaiting    AgentState = "waiting"    // it has requested no table, or there is none for it yet
	StateCurrent    AgentState = "current"    // it has the current table
	StateUpdating   AgentState = "updating"   // the last push, or a change that was not sent yet, is younger than behindAfter
	StateUnanswered AgentState = "unanswered" // the last push is behindAfter old, or older, and not answered
	StateUnsent     AgentState = "unsent"     // it lacks a change that should have been sent behindAfter ago
	StateRejected   AgentState = "rejected"   // it has rejected the last push that it has answered
)

// behindAfter is how long a client may be without the current table before it is called behind. A
// push to 10,000 clients takes less than a second.
const behindAfter = 10 * time.Second

// The modes of clients, as `nametap status` calls them.
const (
	modeNamed = "named"
	modeWhole = "whole"
)

// seconds returns a time in seconds, with three decimals.
func seconds(d time.Duration) float64 {
	return math.Round(d.Seconds()*1000) / 1000
}

// ago returns the number of seconds between the times t and now; nil if t is 0, which means never.
func ago(now, t time.Duration) *float64 {
	if t == 0 {
		return nil
	}
	past := seconds(now - t)
	return &past
}

// describe describes a viewer, for [Agent.View].
func describe(k *hosts.Viewer) string {
	parts := []string{"namespace " + k.Namespace}
	if k.Families.V4 {
		parts = append(parts, "IPv4")
	}
	if k.Families.V6 {
		parts = append(parts, "IPv6")
	}
	if k.VIPs {
		parts = append(parts, "automatic VIPs")
	}
	if key := k.Sidecar.Key; key.Name != "" {
		parts = append(parts, fmt.Sprintf("Sidecar %s/%s", key.Namespace, key.Name))
	}
	return strings.Join(parts, ", ")
}
