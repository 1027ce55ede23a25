package discovery

import (
	"errors"

	"github.com/nametap/nametap/api"
)

// Client says which client's table [Table] returns.
type Client struct {
	// Namespace is the client's.
	Namespace string
	// AutoAllocate is set for a client that asks for automatic VIPs.
	AutoAllocate bool
}

// Table builds once and returns the table that a client with both address
// families gets, and what is wrong with documents. Nothing is written:
// remembered VIPs are used, new ones forgotten.
func Table(cfg Config, client Client) (*api.NameTable, []DocumentError, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, nil, err
	}
	if err := cfg.checkDir(); err != nil {
		return nil, nil, err
	}
	v := &vips{}
	if cfg.StateDir != "" {
		var err error
		if v, err = readVIPs(cfg.StateDir); err != nil && !errors.Is(err, errDamaged) {
			return nil, nil, err
		}
	}
	r, err := newSource(cfg.ConfigDir, cfg.AllowEmpty, nil).read()
	if err != nil {
		return nil, nil, err
	}
	snap, _ := snapshotOf(r.objects, cfg.ClusterDomain, v)
	key := viewKey{namespace: client.Namespace, families: families{v4: true, v6: true}, vips: client.AutoAllocate}
	return snap.tables(key)[""], r.errs, nil
}
