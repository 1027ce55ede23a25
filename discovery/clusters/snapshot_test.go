package clusters

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/statedir"
)

// text is a snapshot of objects. A change of the fields of objects must not make older files useless.
const text = `[
	{"Key": {"Kind": "Service", "Namespace": "shop", "Name": "web"}, "Service": {
		"ExternalName": "", "Headless": false, "ClusterIPs": ["10.0.0.1", "fd00::1"], "Selector": null, "PublishNotReady": false, "ClusterOnly": false,
		"ExportTo": {"Public": false, "Restricted": true, "Namespaces": ["data", "shop"]}, "Ports": [{"Name": "http", "Number": 80, "Protocol": "TCP"}]}},
	{"Key": {"Kind": "Service", "Namespace": "shop", "Name": "db"}, "Service": {"Headless": true, "PublishNotReady": true, "ClusterOnly": true}},
	{"Key": {"Kind": "Service", "Namespace": "shop", "Name": "alias"}, "Service": {"ExternalName": "www.example.com"}},
	{"Key": {"Kind": "EndpointSlice", "Namespace": "shop", "Name": "db-1"}, "Slice": {"Service": "db", "Ports": [{"Name": "", "Number": 5432, "Protocol": "TCP"}], "Endpoints": [
		{"Addrs": ["10.1.0.1"], "Ready": true, "Hostname": "db-0", "Pod": ""}]}},
	{"Key": {"Kind": "Namespace", "Namespace": "", "Name": "istio-system"}, "Namespace": {"Network": "net1"}}
]`

func objects() []object.Object {
	key := func(kind, namespace, name string) object.Key {
		return object.Key{Kind: kind, Namespace: namespace, Name: name}
	}
	addr := netip.MustParseAddr
	return []object.Object{
		{Key: key("Service", "shop", "web"), Service: &object.Service{
			ClusterIPs: []netip.Addr{addr("10.0.0.1"), addr("fd00::1")}, ExportTo: object.ExportTo{Restricted: true, Namespaces: []string{"data", "shop"}},
			Ports: object.NewPorts([]object.Port{{Name: "http", Number: 80, Protocol: "TCP"}}),
		}},
		{Key: key("Service", "shop", "db"), Service: &object.Service{Headless: true, PublishNotReady: true, ClusterOnly: true}},
		{Key: key("Service", "shop", "alias"), Service: &object.Service{ExternalName: "www.example.com"}},
		{Key: key("EndpointSlice", "shop", "db-1"), Slice: &object.EndpointSlice{Service: "db", Ports: object.NewPorts([]object.Port{{Number: 5432, Protocol: "TCP"}}), Endpoints: []object.Endpoint{
			{Addrs: []netip.Addr{addr("10.1.0.1")}, Ready: true, Hostname: "db-0"},
		}}},
		{Key: key("Namespace", "", "istio-system"), Namespace: &object.Namespace{Network: "net1"}},
	}
}

// D29: saved objects are the same when they are loaded. Every later version must load objects saved
// by this version of the format.
func TestSnapshot(t *testing.T) {
	s := snapshots{statedir.New(t.TempDir(), "lock")}
	if err := s.save("east.1", objects()); err != nil {
		t.Fatal(err)
	}
	saved, err := s.load("east.1")
	if err != nil {
		t.Fatal(err)
	}
	same := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	ports := cmp.Comparer(func(a, b object.Ports) bool { return a == b })
	if diff := cmp.Diff(saved.Objects, objects(), same, ports); diff != "" {
		t.Errorf("saved at %v: -got +want\n%s", saved.Written, diff)
	}
	if got := s.clusters(); len(got) != 1 || got[0] != "east.1" {
		t.Errorf("clusters %q", got)
	}
	if got, err := s.load("west"); got != nil || err != nil {
		t.Errorf("%v, %v", got, err)
	}
	data := fmt.Sprintf(`{"cluster":"east","written":"2026-01-01T12:00:00Z","objects":%s}`, text)
	if err := s.dir.Save(snapshotFile("east"), snapshotFormat, json.RawMessage(data)); err != nil {
		t.Fatal(err)
	}
	old, err := s.load("east")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(old.Objects, objects(), same, ports); diff != "" {
		t.Errorf("-got +want\n%s", diff)
	}
	if err := s.remove("east"); err != nil {
		t.Error(err)
	}
	if err := s.remove("east.1"); err != nil || len(s.clusters()) > 0 {
		t.Errorf("%v, %v", err, s.clusters())
	}
}

// D29: a snapshot that cannot be trusted is not used, and set aside.
func TestDamagedSnapshot(t *testing.T) {
	s := snapshots{statedir.New(t.TempDir(), "lock")}
	if err := s.save("west", objects()); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(s.dir.File(snapshotFile("west")))
	if err != nil {
		t.Fatal(err)
	}
	for name, damaged := range map[string]string{
		"changed":         strings.Replace(string(good), "10.1.0.1", "10.1.0.3", 1),
		"cut":             string(good[:len(good)/2]),
		"another format":  strings.Replace(string(good), snapshotFormat, "nametap-cluster/9", 1),
		"another cluster": string(good),
	} {
		file := s.dir.File(snapshotFile("east"))
		if err := os.WriteFile(file, []byte(damaged), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := s.load("east"); got != nil || !errors.Is(err, statedir.ErrDamaged) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		if aside, err := os.ReadFile(file + ".damaged"); err != nil || string(aside) != damaged {
			t.Errorf("%s: set aside is %s, %v", name, aside, err)
		}
	}
}
