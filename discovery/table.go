package discovery

import (
	"context"
	"errors"
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
	// AutoAllocate says that the client asks for automatic VIPs.
	AutoAllocate bool
	// Labels are those of the client's workload, by which Sidecars select it.
	Labels map[string]string
}

// Table reads the objects once and returns the table of a client with both address families, and
// the errors in objects. It writes nothing: it uses the saved VIPs and does not save new ones. If
// the saved VIPs cannot be read, it returns [ErrVIPs].
func Table(ctx context.Context, cfg Config, client Client) (*api.NameTable, []object.Error, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, nil, err
	}
	if err := cfg.checkDir(); err != nil {
		return nil, nil, err
	}
	vips := hosts.NewVIPs()
	if cfg.StateDir != "" {
		var err error
		if vips, err = readVIPs(cfg.StateDir); err != nil && !errors.Is(err, errDamaged) {
			return nil, nil, err
		}
	}
	all := cfg.newHosts(vips)
	var changes []hosts.Change
	var errs []object.Error
	if cfg.ConfigDir != "" {
		r, err := newDirSource(cfg.ConfigDir, cfg.AllowEmpty, nil).read()
		if err != nil {
			return nil, nil, err
		}
		changes = append(changes, all.Diff(cfg.sourceIndex(fromDir), r.objects))
		errs = append(errs, r.errs...)
	}
	if cfg.Kubernetes != nil {
		objects, broken, err := readKubernetes(ctx, cfg)
		if err != nil {
			return nil, nil, err
		}
		changes = append(changes, all.Diff(cfg.sourceIndex(fromKubernetes), objects))
		errs = append(errs, broken...)
	}
	all.Update(changes...)
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
