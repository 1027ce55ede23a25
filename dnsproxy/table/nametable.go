package table

import (
	"strings"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// Infos yields the entries of the table as entries of a NameTable, in no particular order. There is an entry for each
// host, under the key that the control plane gave it, unless its name is a short name of a Service. As in Istio's agent,
// there is also an entry for each short name that the table answers. Each key comes once. The entries belong to the
// caller.
func (t *Table) Infos(yield func(key string, info *api.NameTable_NameInfo) bool) {
	var names [3]wire.Name
	var s Scratch
	for h := range t.all {
		info := h.info(&t.Cluster)
		if owner := t.owner(h.Name, &s); owner.Name != h.Name {
			continue
		}
		if !yield(h.Key(), &api.NameTable_NameInfo{
			Ips: addressTexts(&h.addresses), Registry: info.registry, Shortname: info.shortname, Namespace: info.namespace,
			Alias: strings.TrimSuffix(h.Alias().String(), "."), Headless: h.headless(), Near: h.near[0] + h.near[1],
			Ports: portMessages(&h), Destinations: destinationMessages(&h),
		}) {
			return
		}
		if !h.derived() {
			continue
		}
		short := &api.NameTable_NameInfo{Ips: addressTexts(&h.addresses), Registry: info.registry}
		for _, name := range t.Cluster.heads(h.Name, names[:0]) {
			owner := t.owner(name, &s)
			if owner.Name == h.Name && name != h.Name && !name.Special() && !yield(name.String(), short) {
				return
			}
		}
	}
}

// portMessages returns the ports of a host.
func portMessages(h *Host) []*api.NameTable_Port {
	var messages []*api.NameTable_Port
	for p := range h.ports {
		message := &api.NameTable_Port{Name: p.name, Number: uint32(p.number)}
		if p.protocol != protocolTCP {
			message.Protocol = p.protocol.String()
		}
		if p.partial {
			message.Ips = addressTexts(&p.addresses)
		}
		messages = append(messages, message)
	}
	return messages
}

// destinationMessages returns where connections to a host go.
func destinationMessages(h *Host) []*api.NameTable_Destination {
	var messages []*api.NameTable_Destination
	for d := range h.Destinations {
		message := &api.NameTable_Destination{Port: uint32(d.Port), Endpoints: d.Endpoints}
		if d.Target != d.Port {
			message.Target = uint32(d.Target)
		}
		messages = append(messages, message)
	}
	return messages
}

func addressTexts(a *addresses) []string {
	var texts []string
	for addr := range a.all() {
		texts = append(texts, addr.String())
	}
	return texts
}
