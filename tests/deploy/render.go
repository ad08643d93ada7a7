// Renders a Helm chart as Helm does, as far as deploy/helm uses it: Go's templates with sprig's functions, include,
// toYaml, fail and .Files.Get. `go run render.go CHART NAME NAMESPACE SERVICE < values.json`
// prints the manifests, and to stderr the notes.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

type files struct{ chart string }

func (f files) Get(name string) (string, error) {
	content, err := os.ReadFile(filepath.Join(f.chart, name))
	return string(content), err
}

func render() error {
	if len(os.Args) != 5 {
		return errors.New("usage: render CHART NAME NAMESPACE SERVICE < values.json")
	}
	chart := os.Args[1]
	var values map[string]interface{}
	if err := json.NewDecoder(os.Stdin).Decode(&values); err != nil { // numbers are float64, as in Helm
		return err
	}
	var about struct {
		Name       string
		Version    string
		AppVersion string `yaml:"appVersion"`
	}
	content, err := os.ReadFile(filepath.Join(chart, "Chart.yaml"))
	if err != nil {
		return err
	}
	if err := yaml.Unmarshal(content, &about); err != nil {
		return err
	}
	all := template.New("chart").Option("missingkey=error")
	functions := sprig.TxtFuncMap()
	functions["include"] = func(name string, data interface{}) (string, error) {
		var out bytes.Buffer
		err := all.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	functions["toYaml"] = func(value interface{}) (string, error) {
		var out bytes.Buffer
		encoder := yaml.NewEncoder(&out)
		encoder.SetIndent(2)
		err := encoder.Encode(value)
		return strings.TrimSuffix(out.String(), "\n"), err
	}
	functions["fail"] = func(why string) (string, error) { return "", errors.New(why) }
	all.Funcs(functions)
	paths, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if _, err := all.New(filepath.Base(path)).Parse(string(text)); err != nil {
			return err
		}
	}
	data := map[string]interface{}{
		"Values":  values,
		"Chart":   about,
		"Files":   files{chart},
		"Release": map[string]interface{}{"Name": os.Args[2], "Namespace": os.Args[3], "Service": os.Args[4]},
	}
	for _, path := range paths {
		name := filepath.Base(path)
		if strings.HasPrefix(name, "_") {
			continue
		}
		var out bytes.Buffer
		if err := all.ExecuteTemplate(&out, name, data); err != nil {
			return err
		}
		if name == "NOTES.txt" {
			fmt.Fprint(os.Stderr, out.String())
		} else if strings.TrimSpace(out.String()) != "" {
			fmt.Printf("---\n# Source: %s\n%s\n", name, strings.TrimSpace(out.String()))
		}
	}
	return nil
}

func main() {
	if err := render(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
