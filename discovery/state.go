package discovery

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/statedir"
)

// The files of the state directory. Each holds a format, a checksum and the data.
const (
	lockName      = "nametap-discovery.lock"
	vipsFile      = "vips.json"
	vipsFormat    = "nametap-vips/1"
	objectsFile   = "objects.json"
	objectsFormat = "nametap-objects/1"
)

// errDamaged marks a state file that exists but cannot be trusted.
var errDamaged = errors.New("damaged")

// ErrVIPs reports that the automatic VIPs in the state directory cannot be read.
var ErrVIPs = errors.New("reading the automatic VIPs")

// openState locks the state directory and checks that files can be written to it. A
// second control plane with the same directory would overwrite the files of the first.
func openState(path string) (*statedir.Dir, error) {
	dir := statedir.New(path, lockName)
	err := dir.Lock()
	if errors.Is(err, statedir.ErrTaken) {
		return nil, fmt.Errorf("state directory %q: %w", path, err)
	}
	if err == nil {
		err = statedir.Check(path)
	}
	if err != nil {
		dir.Unlock()
		return nil, fmt.Errorf("state directory %q: %w: make it writable, or name another (--state-dir)", path, err)
	}
	return dir, nil
}

// vipsState is the content of the VIP file. Sum is the checksum of Hosts; it detects a
// file that was truncated or edited by hand.
type vipsState struct {
	Format string          `json:"format"`
	Sum    string          `json:"sum"`
	Hosts  json.RawMessage `json:"hosts"`
}

// loadVIPs reads the VIPs of a state directory. It returns none if there is no file. If
// the file is damaged, loadVIPs moves it aside and returns no VIPs and errDamaged.
func loadVIPs(dir string) (*hosts.VIPs, error) {
	v, err := readVIPs(dir)
	if !errors.Is(err, errDamaged) {
		return v, err
	}
	err = setAside(filepath.Join(dir, vipsFile), err)
	if errors.Is(err, errDamaged) {
		err = fmt.Errorf("%w; hosts may get other VIPs", err)
	}
	return v, err
}

// setAside moves a damaged file aside and adds its new path to err. If the file cannot
// be moved, setAside returns that error, which is not errDamaged.
func setAside(path string, err error) error {
	aside := path + ".damaged"
	if renameErr := os.Rename(path, aside); renameErr != nil {
		return fmt.Errorf("setting a damaged file aside: %w", renameErr)
	}
	return fmt.Errorf("%w; it was moved to %s", err, aside)
}

// readVIPs is loadVIPs, except that it leaves a damaged file in place.
func readVIPs(dir string) (*hosts.VIPs, error) {
	path := filepath.Join(dir, vipsFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return hosts.NewVIPs(), nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w (--state-dir): %w", ErrVIPs, err)
	}
	v, err := decodeVIPs(data)
	if err != nil {
		return hosts.NewVIPs(), fmt.Errorf("VIP file %s is %w: %w", path, errDamaged, err)
	}
	return v, nil
}

func decodeVIPs(data []byte) (*hosts.VIPs, error) {
	var s vipsState
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	if s.Format != vipsFormat {
		return nil, fmt.Errorf("format %q, want %q", s.Format, vipsFormat)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, s.Hosts); err != nil {
		return nil, fmt.Errorf("hosts: %w", err)
	}
	if sum(compact.Bytes()) != s.Sum {
		return nil, errors.New("the checksum does not match")
	}
	return hosts.DecodeVIPs(s.Hosts)
}

// saveVIPs writes the VIPs to the state directory.
func saveVIPs(dir *statedir.Dir, v *hosts.VIPs) error {
	encoded, err := v.Encode()
	if err != nil {
		return fmt.Errorf("encoding the automatic VIPs: %w", err)
	}
	data, err := json.MarshalIndent(vipsState{Format: vipsFormat, Sum: sum(encoded), Hosts: encoded}, "", " ")
	if err != nil {
		return fmt.Errorf("encoding the automatic VIPs: %w", err)
	}
	if err := dir.Write(vipsFile, append(data, '\n')); err != nil {
		return fmt.Errorf("writing the automatic VIPs (--state-dir): %w", err)
	}
	return nil
}

// objectsState is the content of the file of last good objects. Sum is the checksum of
// Documents.
type objectsState struct {
	Format    string          `json:"format"`
	Sum       string          `json:"sum"`
	Documents json.RawMessage `json:"documents"`
}

// savedDocument is a document with at least one object in use. The file keeps the text
// as its author wrote it and not the decoded objects, so that a later version of nametap
// can read fields that this one does not know.
type savedDocument struct {
	File    string        `json:"file"`
	Before  int           `json:"linesBefore"`
	Text    []byte        `json:"text"`
	Objects []savedObject `json:"objects"`
}

type savedObject struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// saveObjects writes the last good objects to the state directory.
func saveObjects(dir *statedir.Dir, good map[object.Key]located) error {
	byText := map[*chunk]*savedDocument{}
	for k, o := range good {
		d := byText[o.text]
		if d == nil {
			d = &savedDocument{File: o.file, Before: o.text.offset, Text: o.text.text}
			byText[o.text] = d
		}
		d.Objects = append(d.Objects, savedObject{Kind: k.Kind, Namespace: k.Namespace, Name: k.Name})
	}
	docs := make([]*savedDocument, 0, len(byText))
	for _, d := range byText {
		slices.SortFunc(d.Objects, func(a, b savedObject) int {
			return object.Key(a).Compare(object.Key(b))
		})
		docs = append(docs, d)
	}
	slices.SortFunc(docs, func(a, b *savedDocument) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Before, b.Before), bytes.Compare(a.Text, b.Text))
	})
	documents, err := json.Marshal(docs)
	if err != nil {
		return fmt.Errorf("encoding the last good objects: %w", err)
	}
	data, err := json.Marshal(objectsState{Format: objectsFormat, Sum: sum(documents), Documents: documents})
	if err != nil {
		return fmt.Errorf("encoding the last good objects: %w", err)
	}
	if err := dir.Write(objectsFile, append(data, '\n')); err != nil {
		return fmt.Errorf("writing the last good objects (--state-dir): %w", err)
	}
	return nil
}

// loadObjects reads the last good objects of a state directory. It returns none if there
// is no file. If the file is damaged, loadObjects moves it aside and returns no objects
// and errDamaged.
func loadObjects(dir string) (map[object.Key]located, error) {
	path := filepath.Join(dir, objectsFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[object.Key]located{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the last good objects (--state-dir): %w", err)
	}
	good, err := decodeObjects(data)
	if err != nil {
		err = fmt.Errorf("file of last good objects %s is %w: %w", path, errDamaged, err)
		return map[object.Key]located{}, setAside(path, err)
	}
	return good, nil
}

func decodeObjects(data []byte) (map[object.Key]located, error) {
	var s objectsState
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	if s.Format != objectsFormat {
		return nil, fmt.Errorf("format %q, want %q", s.Format, objectsFormat)
	}
	if sum(s.Documents) != s.Sum {
		return nil, errors.New("the checksum does not match")
	}
	var docs []savedDocument
	if err := json.Unmarshal(s.Documents, &docs); err != nil {
		return nil, fmt.Errorf("documents: %w", err)
	}
	good := map[object.Key]located{}
	for _, d := range docs {
		p := parsed{broken: map[object.Key]bool{}}
		p.parseDocument(d.File, &chunk{text: d.Text, offset: d.Before})
		inUse := map[savedObject]bool{}
		for _, o := range d.Objects {
			inUse[o] = true
		}
		for _, o := range p.objects {
			if inUse[savedObject{Kind: o.Key.Kind, Namespace: o.Key.Namespace, Name: o.Key.Name}] {
				good[o.Key] = o
			}
		}
	}
	return good, nil
}

func sum(data []byte) string {
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:])
}
