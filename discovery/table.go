package discovery

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/push"
)

// Client selects the client whose table [Table] returns.
type Client struct {
	// Namespace is the client's namespace.
	Namespace string
	// AutoAllocate is true if the client asks for automatic VIPs.
	AutoAllocate bool
	// Labels are the labels of the client's workload, by which Sidecars select it.
	Labels map[string]string
}

// Table reads the objects once, and fails if ctx ends before that. It returns the table of a client that has both address
// families, and the errors in objects, also in hosts that are left out.
func Table(ctx context.Context, cfg Config, client Client) (*api.NameTable, []object.Error, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, nil, err
	}
	cfg.ClustersNamespace = ""
	in, err := newInputs(cfg, func(error) {})
	if err != nil {
		return nil, nil, err
	}
	all := cfg.newHosts(len(in.all))
	errs, err := in.readAll(ctx, all.Update)
	if err != nil {
		return nil, nil, err
	}
	t, err := client.table(all)
	return t, errs, err
}

// table returns the table of the client.
func (c Client) table(all *hosts.Hosts) (*api.NameTable, error) {
	encoded := push.Encode(all, hosts.View{
		Namespace: c.Namespace, Families: hosts.Families{V4: true, V6: true}, VIPs: c.AutoAllocate,
		Sidecar: all.Sidecar(c.Namespace, hosts.NewLabels(c.Labels)),
	})
	t := new(api.NameTable)
	if err := proto.Unmarshal(encoded, t); err != nil {
		return nil, fmt.Errorf("decoding the table: %w", err)
	}
	return t, nil
}
