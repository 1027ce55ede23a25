package push

import (
	"fmt"
	"math"
	"net"
	"strings"
	"time"

	"github.com/nametap/nametap/discovery/hosts"
)

// An Agent is the state of a client that has a stream.
type Agent struct {
	// Replica is the replica of the control plane that the client is connected to.
	Replica string `json:"replica"`
	// Namespace, Name and ID are from the node id; Name is the pod, or the host of a VM. All are empty before the
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
	// Mode is what a change sends: "hosts" or "whole". Variant is the ADS variant.
	Mode    string `json:"mode"`
	Variant string `json:"variant"`
	// View describes what the client has in common with the clients that see the same hosts.
	View string `json:"view"`
	// The times are in seconds ago; nil means never.
	ConnectedSeconds float64  `json:"connectedSeconds"`
	LastPushSeconds  *float64 `json:"lastPushSeconds"`
	LastAckSeconds   *float64 `json:"lastAckSeconds"`
	// Digest is the checksum of the table that the client has acknowledged last on this stream; "" for none.
	// ServedDigest is the checksum of the client's current table, which has Hosts hosts.
	Digest       string `json:"digest"`
	ServedDigest string `json:"servedDigest"`
	Hosts        int    `json:"hosts"`
	// Current is true if both checksums are equal. Behind is true if the client has been without its
	// current table for longer than pushes take.
	Current bool       `json:"current"`
	Behind  bool       `json:"behind"`
	State   AgentState `json:"state"`
	// Nack is the last push that the client has rejected on this stream. If there is none, and the client's last answer
	// on its previous stream was a NACK, it is the push that this NACK rejected; otherwise nil.
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
	StateWaiting      AgentState = "waiting"      // it has requested no table, or there is none for it yet
	StateCurrent      AgentState = "current"      // it has the current table
	StateUpdating     AgentState = "updating"     // the last push, or a change that was not sent yet, is younger than behindAfter
	StateUnanswered   AgentState = "unanswered"   // it has not answered the last push for behindAfter
	StateUnsent       AgentState = "unsent"       // the current table was not sent to it for behindAfter
	StateRejected     AgentState = "rejected"     // it has rejected the last push that it has answered
	StateUnsubscribed AgentState = "unsubscribed" // it wants no table
)

// behindAfter is how long a client may be without the current table before it is called behind.
// With 10,000 clients, a push to all takes less than a second.
const behindAfter = 10 * time.Second

// The modes of clients, as `nametap status` calls them.
const (
	modeHosts = "hosts"
	modeWhole = "whole"
)

func addressOf(a net.Addr) string {
	if a == nil {
		return ""
	}
	return a.String()
}

// seconds returns a time in seconds, with three decimals.
func seconds(d time.Duration) float64 {
	return math.Round(d.Seconds()*1000) / 1000
}

// ago returns how long ago a time was; nil if it was never.
func ago(now, at time.Duration) *float64 {
	if at == 0 {
		return nil
	}
	past := seconds(now - at)
	return &past
}

// describe describes the clients that see hosts as a viewer does.
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
