package push

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/nametap/nametap/discovery/hosts"
)

// Consistency says which tables this replica serves, and which its clients have.
type Consistency struct {
	// Differences is how often a client had another table from a replica with the same objects.
	Differences uint64      `json:"replica_differences"`
	Views       []ViewState `json:"views"`
}

// ViewState is the state of the clients that see the same.
type ViewState struct {
	// Client is what they have in common.
	Client string `json:"client"`
	// Digest is the checksum of their table, and Hosts the number of its hosts.
	Digest string `json:"digest"`
	Hosts  int    `json:"hosts"`
	// Clients is their number by the digest of the table that they have accepted; "" for those that have
	// accepted none yet.
	Clients map[string]int `json:"clients"`
	// Others are the nodes of clients that have another table, at most maxOthers of each view.
	Others []string `json:"others,omitempty"`
}

// maxOthers bounds the nodes that are listed.
const maxOthers = 20

// Consistency returns the state of all views, sorted by Client.
func (s *Service) Consistency() Consistency {
	t := s.tables
	t.mu.Lock()
	defer t.mu.Unlock()
	c := Consistency{Differences: s.differences.Load(), Views: []ViewState{}}
	for _, v := range t.viewsLocked() {
		if len(v.sessions) > 0 {
			c.Views = append(c.Views, v.state())
		}
	}
	slices.SortFunc(c.Views, func(a, b ViewState) int { return cmp.Compare(a.Client, b.Client) })
	return c
}

func (v *view) state() ViewState {
	state := ViewState{Client: describe(&v.viewer), Digest: v.version(), Hosts: v.base.entries + v.entries, Clients: map[string]int{}}
	for s := range v.sessions {
		if state.Clients[s.accepted]++; s.accepted != state.Digest && len(state.Others) < maxOthers {
			state.Others = append(state.Others, s.client.node)
		}
	}
	slices.Sort(state.Others)
	return state
}

// describe describes the clients of a viewer.
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

// replicasDiffer logs and counts that a client comes from a replica with the same objects and another table.
func (s *Service) replicasDiffer(node string) {
	s.differences.Add(1)
	s.rejections.Do(func() {
		s.cfg.Logger.Error("another replica with the same objects serves another table: are all of the same release, and with the same flags? "+
			"Compare their /debug/consistency", "node", cut(node))
	})
}
