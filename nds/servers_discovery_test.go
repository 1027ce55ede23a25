package nds_test

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"time"

	meshhosts "github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/push"
)

// A discovery is the service of nametap-discovery. Each host is a ServiceEntry.
type discovery struct {
	*push.Service
	end  context.CancelFunc
	have table
}

func newDiscovery() controlPlane {
	read := make(chan struct{})
	close(read)
	d := &discovery{Service: push.New(push.Config{
		Hosts: meshhosts.New("cluster.local", 1), FirstRead: read, AckTimeout: time.Minute, Logger: slog.New(slog.DiscardHandler),
		Waiting: func() string { return "" },
	})}
	ctx, end := context.WithCancel(context.Background())
	d.end = end
	go d.Run(ctx)
	return d
}

func (d *discovery) set(all tables) {
	var change meshhosts.Change
	key := func(host string) object.Key {
		return object.Key{Kind: object.KindServiceEntry, Namespace: "shop", Name: strings.ToLower(host)}
	}
	for host := range d.have {
		if all[""][host] == nil {
			change.Removed = append(change.Removed, key(host))
		}
	}
	for host, info := range all[""] {
		if info == d.have[host] {
			continue
		}
		entry := &object.ServiceEntry{Hosts: []string{host}, HasAddresses: true, ExportTo: object.ExportTo{Public: true}}
		for _, ip := range info.GetIps() {
			entry.Addrs = append(entry.Addrs, netip.MustParseAddr(ip))
		}
		change.Updated = append(change.Updated, object.Object{Key: key(host), Entry: entry})
	}
	d.have = maps.Clone(all[""])
	d.Update([]meshhosts.Change{change}, func(meshhosts.Update, meshhosts.Counts) {})
}

func (d *discovery) close() {
	d.end()
	d.Wait()
}
