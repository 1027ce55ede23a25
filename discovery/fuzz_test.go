package discovery

import (
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/examples"
)

// FuzzParse makes tables of arbitrary text. Errors must name a document, and tables
// must hold only hosts and addresses that agents can use.
func FuzzParse(f *testing.F) {
	err := fs.WalkDir(examples.Files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(examples.Files, path)
		f.Add(string(data))
		return err
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text string) {
		objects, errs := read(t, text)
		lines := strings.Count(text, "\n") + 2
		for _, e := range errs {
			if e.File != "f.yaml" || e.Document < 1 || e.Document > lines || e.Msg == "" {
				t.Errorf("error %+v for %d lines", e, lines)
			}
		}
		all := allOf(objects)
		for _, of := range []hosts.View{
			{Namespace: "shop", Families: bothFamilies, VIPs: true}, {Namespace: "default", Families: hosts.Families{V4: true}},
		} {
			for host, info := range tableIn(t, all, of).GetTable() {
				if !object.IsHost(host) && len(host) <= 253 {
					t.Errorf("host %q", host)
				}
				if len(info.GetIps()) == 0 && info.GetRegistry() != "Kubernetes" {
					t.Errorf("host %q has no address", host)
				}
				for _, ip := range info.GetIps() {
					if a, err := netip.ParseAddr(ip); err != nil || a.String() != ip {
						t.Errorf("host %q has address %q", host, ip)
					}
				}
				for _, d := range info.GetDestinations() {
					if d.GetPort() == 0 || d.GetPort() > 65535 || d.GetTarget() > 65535 || !of.VIPs || info.GetRegistry() != "External" {
						t.Errorf("host %q has the destination %v", host, d)
					}
				}
				for _, p := range info.GetPorts() {
					if p.GetNumber() == 0 || p.GetNumber() > 65535 || p.GetName() != "" && (!object.IsLabel(p.GetName()) || len(p.GetName()) > 62) {
						t.Errorf("host %q has the port %v", host, p)
					}
					for _, ip := range p.GetIps() {
						if !slices.Contains(info.GetIps(), ip) {
							t.Errorf("host %q without the address of the port %v", host, p)
						}
					}
				}
			}
		}
	})
}
